"""Bad input, and exceptions in a program."""
