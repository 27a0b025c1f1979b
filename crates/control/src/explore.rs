//! Search through every state of a model, for tests.
//!
//! Breadth first, so that a violation comes with one of the shortest ways to it. It needs a set, a queue and the way back to the start, which is
//! less code than an integration with a library.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
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

/// Explores every state that can follow `start`.
pub(crate) fn explore<M: Model>(start: M) -> Explored<M::Step> {
    let mut seen: HashMap<u128, Option<(usize, M::Step)>> = HashMap::new();
    let mut order = vec![(start, 0)];
    let mut queue = VecDeque::from([0]);
    let mut hashed = Hashed::default();
    seen.insert(hashed.of(&start), None);
    let mut depth = 0;
    while let Some(index) = queue.pop_front() {
        let (state, at) = order[index];
        depth = depth.max(at);
        if let Err(text) = state.check() {
            return Explored {
                states: order.len(),
                depth,
                violation: Some((text, way(&seen, &order, state))),
            };
        }
        for step in state.steps() {
            let next = state.after(step);
            if let Entry::Vacant(entry) = seen.entry(hashed.of(&next)) {
                entry.insert(Some((index, step)));
                order.push((next, at + 1));
                queue.push_back(order.len() - 1);
            }
        }
    }
    Explored { states: order.len(), depth, violation: None }
}

fn way<M: Model>(
    seen: &HashMap<u128, Option<(usize, M::Step)>>,
    order: &[(M, usize)],
    mut state: M,
) -> Vec<M::Step> {
    let mut steps = Vec::new();
    let mut hashed = Hashed::default();
    while let Some(Some((from, step))) = seen.get(&hashed.of(&state)) {
        steps.push(*step);
        state = order[*from].0;
    }
    steps.reverse();
    steps
}
