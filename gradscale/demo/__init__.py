"""`gradscale demo`: the same network trained in four ways, and the picture of it."""
