"""The style of all HTML: the colours of the page around it, light or dark, and of any width."""

COLOURS = (
    *("#7cb5ec", "#f2b866", "#86d0a5", "#e59a9a", "#c3a6e0", "#d3c95f"),
    *("#7fd1cf", "#e7a8cf", "#b4c0cc", "#b9d67a", "#d9a988", "#9fb0f0"),
)
"""Of slices and parts of a tree; dark text can be read on each."""

MAP_ASPECT = 2.4
"""Width of a treemap by its height."""
LABEL_STEP = 3
MAX_LABEL = 36
"""Labels of a treemap are shown where as many characters fit as the multiple of `LABEL_STEP` that
is at least their length. Of a long and a short one the short is for where the long does not fit."""

_LABELS = "\n".join(
    f"@container (min-width: {n + 2}ch) and (min-height: 1.8em) "
    f"{{.pc-map .pc-n{n} {{display: block}} .pc-map .pc-n{n} + span {{display: none}}}}"
    for n in range(LABEL_STEP, MAX_LABEL + 1, LABEL_STEP)
)

STYLE = f"""
.pc {{font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; overflow-wrap: anywhere}}
.pc h1 {{font-size: 1.5em; margin: 0 0 .4em; line-height: 1.25}}
.pc h2 {{font-size: 1.05em; margin: 1.6em 0 .5em; line-height: 1.3}}
.pc p {{margin: .3em 0}}
.pc code, .pc pre, .pc-map, .pc-tree {{font-family: ui-monospace, Menlo, Consolas, monospace}}
.pc code, .pc pre, .pc-map, .pc-tree {{font-size: 12.5px}}
.pc pre {{white-space: pre-wrap; margin: .3em 0}}
.pc-dim {{opacity: .68}}
.pc-good {{color: #259a58}}
.pc-bad {{color: #d4504b}}
.pc-facts {{display: grid; grid-template-columns: repeat(auto-fill, minmax(150px, 1fr));
 gap: 10px 18px; margin: .6em 0; padding: 0}}
.pc-facts div {{min-width: 0}}
.pc-facts dt {{font-size: .8em; opacity: .68}}
.pc-facts dd {{margin: 0}}
.pc-map {{position: relative; width: 100%; aspect-ratio: {MAP_ASPECT}; border-radius: 6px;
 overflow: hidden}}
.pc-map > div {{position: absolute; box-sizing: border-box; container-type: size;
 border: 1px solid Canvas; color: #16202b; border-radius: 3px}}
.pc-map span {{display: none; padding: .2em 1ch; white-space: nowrap; line-height: 1.3}}
.pc-legend {{display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; padding: 0;
 margin: .5em 0; font-size: .9em}}
.pc-legend i {{display: inline-block; width: .8em; height: .8em; border-radius: 3px;
 margin-right: .45em}}
.pc details {{margin: .35em 0}}
.pc summary {{cursor: pointer}}
.pc-tree ul {{list-style: none; margin: 0; padding-left: 1.3em;
 border-left: 1px solid color-mix(in srgb, currentColor 18%, transparent)}}
.pc-tree ul ul ul ul ul ul ul ul ul {{padding-left: 0; border-left: 0}}
.pc-tree details {{margin: 0}}
.pc-leaf {{padding-left: 1.1em}}
.pc-planes {{display: flex; flex-wrap: wrap; gap: 12px 36px; margin: .5em 0}}
.pc-planes figure {{margin: 0; min-width: 0; max-width: 100%}}
.pc-planes figcaption {{font-size: .8em; opacity: .68}}
.pc-plane {{display: grid; gap: 2px; margin: 3px 0 8px; width: fit-content; max-width: 100%}}
.pc-plane div {{color: #16202b; border-radius: 3px; padding: .35em .6em; text-align: center;
 font-size: 12px; min-width: 0; line-height: 1.3}}
.pc-plane.pc-wide div {{padding: .35em 0; font-size: 9px}}
.pc-bars {{display: grid; grid-template-columns: fit-content(40%) 1fr max-content;
 gap: 4px 10px; align-items: center}}
.pc-bars > * {{min-width: 0}}
.pc-bar {{height: .8em; border-radius: 3px; min-width: 2px}}
.pc-rows {{margin: .4em 0; padding: 0; list-style: none}}
.pc-rows > li {{padding: .35em 0;
 border-top: 1px solid color-mix(in srgb, currentColor 18%, transparent)}}
{_LABELS}
"""

PAGE_STYLE = f"""
:root {{color-scheme: light dark}}
body {{margin: 0; padding: 24px clamp(12px, 4vw, 40px); background: Canvas; color: CanvasText}}
.pc {{margin: 0 auto}}
{STYLE}
"""
