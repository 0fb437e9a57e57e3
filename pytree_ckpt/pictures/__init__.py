"""Pictures of checkpoints, from plain data: words, layouts, treemaps, and HTML without scripts."""
