"""TensorBoard, wandb, mlflow and trackio: one run over all starts."""
