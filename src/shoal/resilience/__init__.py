"""What a run does when a part of it fails: decisions as pure state machines, without clock, sockets or torch."""
