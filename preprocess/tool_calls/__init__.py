"""How models write tool calls: the known formats, each with its reader and its grammar, and how a template's format is
found."""
