"""The command line: one module a verb, which parses options, calls a room below, and prints what it returns."""
