"""What a device's memory holds: tensor hashes made on it, the allocator's view, the driver's view."""
