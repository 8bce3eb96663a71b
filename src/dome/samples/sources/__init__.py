"""Where gradient samples come from."""
