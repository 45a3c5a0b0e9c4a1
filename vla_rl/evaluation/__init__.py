"""What a policy does on episodes that it was not trained on."""
