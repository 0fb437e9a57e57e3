"""`python -m pytree_ckpt` is the command line."""

from pytree_ckpt.cli.main import main

main(prog_name="python -m pytree_ckpt")
