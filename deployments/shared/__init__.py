"""What all replicas of the ingress share: items and their names, uploaded files, the ledger of the budgets."""
