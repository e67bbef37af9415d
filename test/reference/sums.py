"""Sums of rows that are named by their places."""

import torch


def sum_rows(rows, places):
    """(T, N): of each row of places (T, k) the sum of those rows (R, N), in float32, one after the other, and rounded
    once. A place outside of the rows adds nothing."""
    total = torch.zeros(len(places), rows.shape[1])
    for t, row in enumerate(places.tolist()):
        for place in row:
            if 0 <= place < len(rows):
                total[t] += rows[place].float()
    return total.to(rows.dtype)
