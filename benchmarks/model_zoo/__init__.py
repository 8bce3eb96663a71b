"""Which models of other libraries are captured, and how exactly."""
