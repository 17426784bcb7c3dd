"""JAX with compiled initialisation, augmentation and evaluation around gradients that are not compiled themselves."""

import jax
import jax.numpy as jnp


@jax.jit
def initialise(key):
    one, two = jax.random.split(key)
    return {"one": jax.random.normal(one, (16, 32)), "two": jax.random.normal(two, (32, 1))}


@jax.jit
def augment(x, key):
    return x + 0.1 * jax.random.normal(key, x.shape)


@jax.jit
def loss(parameters, x):
    return jnp.square(jnp.tanh(x @ parameters["one"]) @ parameters["two"]).mean()


parameters = initialise(jax.random.key(0))
print([float(loss(parameters, jnp.ones((8, 16)))) for _ in range(6)])
for step in range(8):
    first, second = jax.random.split(jax.random.key(step))
    _, change = jax.value_and_grad(loss)(parameters, augment(augment(jnp.ones((8, 16)), first), second))
    parameters = jax.tree.map(lambda value, by: value - 0.01 * by, parameters, change)
