"""What cross-validations, studies and distillations find."""
