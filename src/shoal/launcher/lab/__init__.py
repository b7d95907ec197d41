"""A lab for slow links: one machine plays several hosts, as network namespaces joined by shaped virtual links."""
