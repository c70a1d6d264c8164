"""Two logical devices for TensorFlow, which cannot be made once it has started."""

from __future__ import annotations

import os

if os.environ.get("KERAS_BACKEND") == "tensorflow":
    import tensorflow as tf

    halves = [tf.config.LogicalDeviceConfiguration() for _ in range(2)]
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
