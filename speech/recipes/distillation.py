"""Knowledge distillation (Panchapagesan et al. 2021): a small student learns the joint's rows of a larger teacher.

    python speech/recipes/distillation.py

At every node of the lattice the student's classes are pulled to the teacher's: the divergence of the three classes
blank, label that leaves the node, and rest. `sum_over_nodes` adds it up in tiles; no logits of all nodes exist.
"""

import jax
import jax.numpy as jnp
from _shared import Digits, check, error_rate, fit, greedy, mean_loss, parse

from jax_rnnt import sum_over_nodes


def three(rows, labels):
    """Log-probabilities [N, 3] of label, blank and rest, of logits [N, V] whose last class is the blank."""
    log_probs = jax.nn.log_softmax(rows)
    label = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[:, None], 1)[:, 0]
    label = jnp.where(labels < 0, -30.0, label)
    both = jnp.stack([label, log_probs[:, -1]], -1)
    others = jnp.log(jnp.maximum(1 - jnp.exp(both).sum(-1), 1e-6))
    return jnp.concatenate([both, others[:, None]], -1)


def divergence(teacher, student, labels):
    """Kullback-Leibler, [N]."""
    p, q = three(teacher, labels), three(student, labels)
    return jnp.sum(jnp.exp(p) * (p - q), -1)


def main():
    args = parse(__doc__, steps=700, student_steps=1000, width=24, weight=0.1)
    digits = Digits(steps=args.steps, seed=args.seed)
    teacher = digits.model()
    taught = fit(teacher.params, mean_loss(teacher), digits)
    few = Digits(steps=args.student_steps, seed=args.seed)

    def train(weight):
        student = few.model(width=args.width, channels=8)

        def mean_loss(params, batch, step):
            rows = []
            for model, parameters in ((teacher, taught), (student, params)):
                network = model.network(parameters)
                x = model.encoded(network, model.inputs(batch), batch)
                rows.append(network.joint.logits(x.frames, x.states))
            lengths = {"logit_lengths": x.frame_lengths, "target_lengths": x.target_lengths}
            kept = jax.lax.stop_gradient(teacher.loss.posteriors(rows[0], *x[2:]))
            apart = sum_over_nodes(divergence, *rows, **lengths, weights=sum(kept), targets=x.targets)
            return jnp.mean(student.loss(rows[1], *x[2:]) + weight * apart)

        return error_rate(greedy(student, fit(student.params, mean_loss, few)), few)

    alone, together = train(0.0), train(args.weight)
    print(f"CER: teacher {error_rate(greedy(teacher, taught), digits):.2f}, student {alone:.2f}")
    check("CER of the student with its teacher, of 100 without", 100 * together / alone, 100)


if __name__ == "__main__":
    main()
