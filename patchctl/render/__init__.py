"""What people see: errors and progress on stderr, data on stdout."""
