//! Search through every state of a model, for tests.
//!
//! Breadth first, so that a violation comes with one of the shortest ways to it. It needs a set, a list and the way back to the start, which is
//! less code than an integration with a library.

use std::collections::HashSet;
use std::hash::{Hash, Hasher};

/// A state, the steps that are possible in it, and what must be true of it.
pub(crate) trait Model: Copy + Eq + Hash {
    type Step: Copy;

    /// Checks the state; the error describes the violation.
    fn check(&self) -> Result<(), String>;

    /// All steps that are possible now.
    fn steps(&self) -> Vec<Self::Step>;

    /// The state after a step.
    fn after(&self, step: Self::Step) -> Self;
}

/// Identifies states by 128 bits of a hash of their bytes. `Hasher`s that calculate take most of the time of a search without
/// optimisation.
#[derive(Default)]
struct Hashed(Vec<u8>);

impl Hashed {
    fn of(&mut self, state: &impl Hash) -> u128 {
        self.0.clear();
        state.hash(self);
        let hash = blake3::hash(&self.0);
        u128::from_le_bytes(*hash.as_bytes().first_chunk().expect("it has 32 bytes"))
    }
}

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("the bytes are hashed at once")
    }
}

/// Result of a search.
pub(crate) struct Explored<S> {
    pub(crate) states: usize,
    pub(crate) depth: usize,
    /// The first violation, and the steps that lead to it.
    pub(crate) violation: Option<(String, Vec<S>)>,
}

/// A state that was found.
struct Found<M: Model> {
    state: M,
    depth: usize,
    /// Index of the state before it, and the step from there.
    from: Option<(usize, M::Step)>,
}

/// Explores every state that can follow `start`.
pub(crate) fn explore<M: Model>(start: M) -> Explored<M::Step> {
    let mut hashed = Hashed::default();
    let mut seen = HashSet::from([hashed.of(&start)]);
    let mut found = vec![Found { state: start, depth: 0, from: None }];
    let (mut index, mut depth) = (0, 0);
    while let Some(&Found { state, depth: at, .. }) = found.get(index) {
        depth = depth.max(at);
        if let Err(text) = state.check() {
            return Explored { states: found.len(), depth, violation: Some((text, way(&found, index))) };
        }
        for step in state.steps() {
            let next = state.after(step);
            if seen.insert(hashed.of(&next)) {
                found.push(Found { state: next, depth: at + 1, from: Some((index, step)) });
            }
        }
        index += 1;
    }
    Explored { states: found.len(), depth, violation: None }
}

/// Steps from the start to the state with this index.
fn way<M: Model>(found: &[Found<M>], mut index: usize) -> Vec<M::Step> {
    let mut steps = Vec::new();
    while let Some((from, step)) = found[index].from {
        steps.push(step);
        index = from;
    }
    steps.reverse();
    steps
}
