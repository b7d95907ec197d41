"""What a message, a matrix product or a step costs: closed forms, each with its source. No torch, no clock."""
