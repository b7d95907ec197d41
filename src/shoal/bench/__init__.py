"""Benchmarks that users run: `shoal bench step`, `comm`, `link`, `sync`, `products`, `codec`; and what all share.

A benchmark is one module. Its command has the benchmark's name, parses options, starts the ranks and prints; its
`measure` runs on every rank. `shoal.cli.bench` lists the modules and imports one only when its verb is called, so that
no torch is imported before the options are checked. The benchmarks of Shoal's own development are outside the
package, in `benchmarks/`, and use the same parts:

    report        rows, checks and the machine, as text or as one JSON object; the statistics of paired measurements
    ranks         starting the ranks of a benchmark, and handing their result back
    options       options that several benchmarks have
    groups        the store, process groups and meshes of a benchmark's ranks; steps timed in turn on all ranks
    training_job  the GPT that is trained, and the one place that assembles a training run
    ddp_script    the peer: the same model in a hand-written DDP script
"""
