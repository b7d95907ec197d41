"""Which rank is where: layouts and their axes, holdings, hosts, links, clusters and graphs. Pure data."""
