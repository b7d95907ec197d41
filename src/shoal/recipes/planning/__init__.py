"""From a run file to plans, predictions and simulations, and what is known of the machine for them."""
