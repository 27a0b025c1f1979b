//! A partially received chunk: the chaining values of its subtrees so far.

use blake3::hazmat::{ChainingValue, Mode, merge_subtrees_non_root, merge_subtrees_root};
use towline_protocol::ram::PAGE_SIZE;

use super::subtree::{Subtree, chaining_value, subtrees, zeros};
use super::{ChunkHash, is_zero};

/// Hash of a subtree's bytes.
#[derive(Debug, Clone, Copy)]
pub(super) enum Value {
    Zero,
    /// The chaining value; in a chunk of one page the hash itself.
    Data(ChainingValue),
}

impl Value {
    fn of(subtree: Subtree, bytes: &[u8], chunk_pages: u16) -> Self {
        if is_zero(bytes) {
            Self::Zero
        } else if chunk_pages == 1 {
            Self::Data(*blake3::hash(bytes).as_bytes())
        } else {
            Self::Data(chaining_value(u64::from(subtree.first) * PAGE_SIZE, bytes))
        }
    }
}

/// A subtree and its value.
#[derive(Debug, Clone, Copy)]
pub(super) struct Node {
    subtree: Subtree,
    value: Value,
}

impl Node {
    /// A subtree of zeros.
    pub(super) fn zero(subtree: Subtree) -> Self {
        Self { subtree, value: Value::Zero }
    }

    /// Hashes a subtree's bytes; `run` begins at page `first` of the chunk.
    pub(super) fn hash(subtree: Subtree, first: u16, run: &[u8], pages: u16) -> Self {
        let from = usize::from(subtree.first - first) * PAGE_SIZE as usize;
        let to = usize::from(subtree.end() - first) * PAGE_SIZE as usize;
        Self { subtree, value: Value::of(subtree, &run[from..to], pages) }
    }

    pub(super) fn is_zero(&self) -> bool {
        matches!(self.value, Value::Zero)
    }

    fn chaining_value(&self) -> &ChainingValue {
        match &self.value {
            Value::Zero => zeros(self.subtree),
            Value::Data(value) => value,
        }
    }

    fn merge(left: &Self, right: &Self) -> Self {
        let value = match (left.value, right.value) {
            (Value::Zero, Value::Zero) => Value::Zero,
            _ => Value::Data(merge_subtrees_non_root(
                left.chaining_value(),
                right.chaining_value(),
                Mode::Hash,
            )),
        };
        Self { subtree: left.subtree.parent(), value }
    }
}

/// Error for a page whose value has been merged into a larger subtree's.
#[derive(Debug)]
pub(super) struct Merged;

/// A partially received chunk: its values so far, in order and disjoint, no two of them siblings. A page
/// without a value is zero.
#[derive(Debug)]
pub(super) struct OpenChunk {
    nodes: Vec<Node>,
    pages: u16,
}

impl OpenChunk {
    /// An empty chunk of `pages`.
    pub(super) fn new(pages: u16) -> Self {
        Self { nodes: Vec::new(), pages }
    }

    /// Removes all values.
    pub(super) fn clear(&mut self) {
        self.nodes.clear();
    }

    /// Allocated memory.
    pub(super) fn bytes(&self) -> usize {
        self.nodes.capacity() * size_of::<Node>()
    }

    /// Inserts the value of a subtree, replacing earlier values of its pages.
    ///
    /// Zeros can always be replaced, since their value is in a table; the other pages of their run then count
    /// as missing, which is zero too, and get no value until they arrive. (Otherwise each page of data would
    /// be merged at once with its zero neighbours, and the next page could no longer replace one of them.)
    pub(super) fn insert(&mut self, mut node: Node) -> Result<(), Merged> {
        let from = self.nodes.partition_point(|other| other.subtree.end() <= node.subtree.first);
        let to = self.nodes.partition_point(|other| other.subtree.first < node.subtree.end());
        if let [there] = &self.nodes[from..to]
            && there.subtree.level > node.subtree.level
        {
            match (there.is_zero(), node.is_zero()) {
                (true, true) => return Ok(()),
                (true, false) => {}
                (false, _) => return Err(Merged),
            }
        }
        self.nodes.drain(from..to);
        let mut at = from;
        while node.subtree.parent().is_within(self.pages) {
            let sibling = node.subtree.sibling();
            let is_left = sibling.first < node.subtree.first;
            let index = at.wrapping_sub(usize::from(is_left));
            if self.nodes.get(index).is_none_or(|other| other.subtree != sibling) {
                break;
            }
            let other = self.nodes.remove(index);
            node = if is_left { Node::merge(&other, &node) } else { Node::merge(&node, &other) };
            at = if is_left { index } else { at };
        }
        self.nodes.insert(at, node);
        Ok(())
    }

    /// Hash of the chunk once each page has a value.
    pub(super) fn root(&self) -> Option<ChunkHash> {
        let pages: u16 = self.nodes.iter().map(|node| 1 << node.subtree.level).sum();
        if pages < self.pages {
            return None;
        }
        if self.is_zero() {
            return Some(ChunkHash::Zero);
        }
        let (first, rest) = self.nodes.split_first()?;
        let Some((last, between)) = rest.split_last() else {
            return Some(ChunkHash::Data(*first.chaining_value()));
        };
        let right = between.iter().rev().fold(*last.chaining_value(), |right, left| {
            merge_subtrees_non_root(left.chaining_value(), &right, Mode::Hash)
        });
        let root = merge_subtrees_root(first.chaining_value(), &right, Mode::Hash);
        Some(ChunkHash::Data(*root.as_bytes()))
    }

    /// Hash of the chunk, with zeros for missing pages.
    pub(super) fn close(mut self) -> ChunkHash {
        let mut gaps = Vec::new();
        let mut next = 0;
        for node in &self.nodes {
            gaps.extend(subtrees(next, node.subtree.first, self.pages));
            next = node.subtree.end();
        }
        gaps.extend(subtrees(next, self.pages, self.pages));
        for gap in gaps {
            self.insert(Node::zero(gap)).expect("a gap has no value");
        }
        self.root().expect("no gap is left")
    }

    /// Returns true if all values are zeros.
    pub(super) fn is_zero(&self) -> bool {
        self.nodes.iter().all(Node::is_zero)
    }
}
