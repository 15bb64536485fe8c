"""The places a recipe can be launched on: one file each."""
