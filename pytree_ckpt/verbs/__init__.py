"""One verb a module. They are in a room of their own, so that `pytree_ckpt.save` is a function."""
