"""Checkpoints: saved in the background, verified before use, loaded into any layout.

    save      copies what a rank holds, and saves it while training goes on
    commit    the newest whole checkpoint of a run; a checkpoint that is named
    manifest  what a checkpoint says it contains
    load      its tensors, into memory of any layout, or whole

The format and its guarantees: docs/checkpoints.md.
"""
