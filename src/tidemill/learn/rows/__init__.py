"""From samples to packed rows: their tokens, images and routes."""
