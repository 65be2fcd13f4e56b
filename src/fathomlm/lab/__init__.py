"""What one measures with: studies, evaluation, analysis, benchmarks, the simulator. Nothing that is deployed imports it."""
