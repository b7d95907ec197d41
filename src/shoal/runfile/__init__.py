"""The run file as a whole: its tables, the rules between them, and how it is read, changed and documented."""
