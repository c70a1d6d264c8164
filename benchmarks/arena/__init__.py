"""Small trainings that tell good rules for the scale from bad ones; `python -m arena` runs them."""
