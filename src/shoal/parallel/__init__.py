"""How the ranks of one replica split a model: tensor, pipeline, context, expert."""
