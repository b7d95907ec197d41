"""Benchmarks that users run: `shoal bench comm`, `step`, `link` and `products`, and what all benchmarks share.

A benchmark is one module. Its command has the benchmark's name, parses options, starts the ranks and prints; its
`measure` runs on every rank. `shoal.cli.bench` lists the modules and imports one only when its verb is called, so that
no torch is imported before the options are checked. The benchmarks of Shoal's own development are outside the
package, in `benchmarks/`, and use the same parts:

    report        rows, checks and the machine, as text or as one JSON object
    ranks         starting the ranks of a benchmark, and handing their result back
    options       options that several benchmarks have
    pairs, turns  paired measurements: the statistics, and the clock
    groups        the store, process groups and meshes of a benchmark's ranks
    training_job  the GPT that is trained, and the one place that assembles a training run
    ddp_script    the peer: the same model in a hand-written DDP script
"""
