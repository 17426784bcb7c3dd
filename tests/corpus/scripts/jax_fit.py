"""Regression in plain JAX: a compiled step of value and gradient."""

import jax
import jax.numpy as jnp


def loss(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - y) ** 2)


@jax.jit
def update(params, x, y):
    gradients = jax.grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)


key = jax.random.PRNGKey(0)
params = {"w1": jax.random.normal(key, (16, 32)), "b1": jnp.zeros(32), "w2": jax.random.normal(key, (32, 1))}
for _ in range(8):
    x = jax.random.normal(key, (64, 16))
    params = update(params, x, x[:, :1])
jax.block_until_ready(params)
