"""Training of networks: one loop for pretraining and finetuning, in one process or many."""
