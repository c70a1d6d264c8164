"""Results of steps: on the device, on their way to the host, and as events there."""
