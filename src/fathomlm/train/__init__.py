"""Training: data in order, objectives, distillation, the loop that resumes where it stopped."""
