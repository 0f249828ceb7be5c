"""Documents beyond the device: in the host's memory, in a store, and which of these is worth it."""
