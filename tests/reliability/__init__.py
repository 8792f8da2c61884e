"""What the system survives, and proof that its security is guarded by tests."""
