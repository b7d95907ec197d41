"""The coordinator: membership as a service, its journal, and the client that ranks use. Thin; `resilience` decides."""
