//! Search through every state of a model, for tests.
//!
//! Breadth first, so that a violation comes with one of the shortest ways to it. It needs a set, a queue and the way back to the start, which is
//! less code than an integration with a library.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::hash::Hash;

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

/// Result of a search.
pub(crate) struct Explored<S> {
    pub(crate) states: usize,
    pub(crate) depth: usize,
    /// The first violation, and the steps that lead to it.
    pub(crate) violation: Option<(String, Vec<S>)>,
}

/// Explores every state that can follow `start`.
pub(crate) fn explore<M: Model>(start: M) -> Explored<M::Step> {
    let mut seen: HashMap<M, Option<(usize, M::Step)>> = HashMap::new();
    let mut order = vec![(start, 0)];
    let mut queue = VecDeque::from([0]);
    seen.insert(start, None);
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
            if let Entry::Vacant(entry) = seen.entry(next) {
                entry.insert(Some((index, step)));
                order.push((next, at + 1));
                queue.push_back(order.len() - 1);
            }
        }
    }
    Explored { states: order.len(), depth, violation: None }
}

fn way<M: Model>(
    seen: &HashMap<M, Option<(usize, M::Step)>>,
    order: &[(M, usize)],
    mut state: M,
) -> Vec<M::Step> {
    let mut steps = Vec::new();
    while let Some(Some((from, step))) = seen.get(&state) {
        steps.push(*step);
        state = order[*from].0;
    }
    steps.reverse();
    steps
}
