"""What may vary: parameters, rules, priors by mode, and the arithmetic that says what cannot start. Pure."""
