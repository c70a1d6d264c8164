"""`gradscale demo`: the same network trained in seven ways, and the picture of it."""
