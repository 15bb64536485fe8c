"""The learner across ranks: one mesh, and what each of its dimensions cuts."""
