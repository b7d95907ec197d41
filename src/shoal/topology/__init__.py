"""Which rank is where: layouts, their axes and holdings; devices, links and clusters, and how often they fail."""
