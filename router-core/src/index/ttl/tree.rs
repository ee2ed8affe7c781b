//! The radix tree of approximate blocks, and each slot's stairs in it.
//!
//! One table of *heads*, the first hash of an edge below a parent, replaces a child table per node.

use hashbrown::HashMap;

use super::Moment;
use super::slab::{NONE, Slab};
use super::state::Run;
use crate::block::{LocalBlockHash, common_prefix};

/// Who places a prompt.
#[derive(Debug)]
pub(super) struct Walk {
    pub(super) slot: u32,
    pub(super) run: u32,
    pub(super) deadline: Moment,
}

/// Where a placed prompt came to lie.
#[derive(Debug)]
pub(super) struct Placed {
    /// Leading blocks that the slot held before.
    pub(super) held: u32,
    /// Leading blocks that it holds now.
    pub(super) end: u32,
    /// Node and deadline of the last of them.
    pub(super) tail: u32,
    pub(super) tail_deadline: Moment,
}

/// The last stair of a run in a node.
#[derive(Debug)]
pub(super) struct LastStair {
    pub(super) deadline: Moment,
    pub(super) blocks: u32,
}

/// What was cut from the end of a slot's stairs.
#[derive(Debug)]
pub(super) struct Cut {
    pub(super) blocks: u32,
    /// Node in which the block before the cut lies.
    pub(super) tail: u32,
}

/// Blocks of a node that one slot holds for one run until one deadline: from the end of the slot's stair before to `end`.
#[derive(Clone, Copy, Debug)]
struct Stair {
    deadline: Moment,
    slot: u32,
    run: u32,
    end: u32,
}

#[derive(Debug)]
struct Node {
    edge: Vec<LocalBlockHash>,
    /// By slot, then by end; a slot's deadlines never rise.
    stairs: Vec<Stair>,
    parent: u32,
    children: u32,
    /// Exclusive or of the children's numbers: names the child when it is the only one.
    children_xor: u32,
}

#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Slab<Node>,
    /// Node by its parent and the first hash of its edge.
    heads: HashMap<(u32, LocalBlockHash), u32>,
    blocks: usize,
    scratch: Vec<Stair>,
}

impl Tree {
    /// Returns the number of blocks, each counted once.
    pub(super) const fn blocks(&self) -> usize {
        self.blocks
    }

    /// Returns the number of nodes.
    pub(super) const fn nodes(&self) -> usize {
        self.nodes.len()
    }

    /// Sets `depths[slot]` to the leading blocks that each slot holds beyond `now`.
    pub(super) fn overlap(&self, sequence: &[LocalBlockHash], now: Moment, depths: &mut [u32]) {
        let mut parent = NONE;
        let mut start = 0;
        let mut rest = sequence;
        while let Some(node) = rest.first().and_then(|head| self.child(parent, *head)) {
            let edge = &self.nodes[node].edge;
            let matched = shared_blocks(edge, rest);
            let mut is_held = false;
            for stair in self.nodes[node]
                .stairs
                .iter()
                .filter(|stair| stair.deadline > now)
            {
                is_held = true;
                // Later stairs of the same slot reach deeper, as do those in nodes below.
                depths[stair.slot as usize] = start + stair.end.min(matched);
            }
            if !is_held || (matched as usize) < edge.len() {
                return;
            }
            start += matched;
            rest = &rest[matched as usize..];
            parent = node;
        }
    }

    /// Places a prompt for one slot and run, adding the blocks taken from each older run to `taken`.
    pub(super) fn place(
        &mut self,
        sequence: &[LocalBlockHash],
        walk: &Walk,
        runs: &mut Slab<Run>,
        taken: &mut Vec<(u32, u32)>,
    ) -> Placed {
        let mut placed = Placed {
            held: 0,
            end: 0,
            tail: NONE,
            tail_deadline: walk.deadline,
        };
        let mut rest = sequence;
        while let Some((node, matched)) = self.enter(placed.tail, rest, runs) {
            placed.held += self.claim(node, matched, walk, taken, &mut placed.tail_deadline);
            placed.end += matched;
            placed.tail = node;
            rest = &rest[matched as usize..];
            if (matched as usize) < self.nodes[node].edge.len() {
                break;
            }
        }
        placed
    }

    /// Returns the last stair of a run of `slot` in `node`, where it has one. Stairs of older runs may follow it.
    pub(super) fn last_stair(&self, node: u32, slot: u32, run: u32) -> LastStair {
        let stairs = &self.nodes[node].stairs;
        let mut last = last_stair_of(stairs, slot);
        while stairs[last].run != run {
            last -= 1;
        }
        LastStair {
            deadline: stairs[last].deadline,
            blocks: stairs[last].end - stair_start(stairs, last),
        }
    }

    /// Takes up to `blocks` blocks from the last stair of `slot` in `node`; [`trim`](Self::trim) must follow.
    ///
    /// The slot must hold nothing below them.
    pub(super) fn cut(&mut self, node: u32, slot: u32, blocks: u32) -> Cut {
        let Node { stairs, parent, .. } = &mut self.nodes[node];
        let last = last_stair_of(stairs, slot);
        let start = stair_start(stairs, last);
        let length = stairs[last].end - start;
        if blocks < length {
            stairs[last].end -= blocks;
            return Cut { blocks, tail: node };
        }
        stairs.remove(last);
        if stairs.len() < stairs.capacity() / 2 {
            stairs.shrink_to_fit();
        }
        let tail = if start > 0 { node } else { *parent };
        Cut {
            blocks: length,
            tail,
        }
    }

    /// Returns the memory of blocks at the end of `node` that no slot holds any more.
    pub(super) fn trim(&mut self, number: u32, runs: &mut Slab<Run>) {
        let node = &mut self.nodes[number];
        if node.children > 0 {
            return; // Who holds a child holds all of the edge.
        }
        let end = node.stairs.iter().map(|stair| stair.end).max().unwrap_or(0) as usize;
        self.blocks -= node.edge.len() - end;
        if end > 0 {
            node.edge.truncate(end);
            // A quarter of slack keeps block-by-block eviction from copying the edge each time.
            if node.edge.capacity() > end + end / 4 + 4 {
                node.edge.shrink_to_fit();
            }
            return;
        }
        let node = self.nodes.remove(number);
        self.heads.remove(&(node.parent, node.edge[0]));
        if 4 * self.heads.len() < self.heads.capacity() {
            self.heads.shrink_to_fit();
        }
        if node.parent != NONE {
            let parent = &mut self.nodes[node.parent];
            parent.children -= 1;
            parent.children_xor ^= number;
            if parent.children == 1 {
                self.merge(node.parent, runs);
            }
        }
    }

    /// Returns the child of `parent` whose edge begins with `head`.
    fn child(&self, parent: u32, head: LocalBlockHash) -> Option<u32> {
        self.heads.get(&(parent, head)).copied()
    }

    /// Finds or makes the node below `parent` that `rest` goes through, and how many blocks of it `rest` shares.
    ///
    /// The edge ends where `rest` leaves it. None when `rest` is at its end.
    fn enter(
        &mut self,
        parent: u32,
        rest: &[LocalBlockHash],
        runs: &mut Slab<Run>,
    ) -> Option<(u32, u32)> {
        let head = rest.first()?;
        let Some(number) = self.child(parent, *head) else {
            return Some((self.add_leaf(parent, rest), length_of(rest)));
        };
        let node = &mut self.nodes[number];
        let matched = shared_blocks(&node.edge, rest);
        if matched as usize == rest.len() {
            return Some((number, matched));
        }
        if (matched as usize) < node.edge.len() {
            return Some((self.split(number, matched, runs), matched));
        }
        if node.children > 0 {
            return Some((number, matched));
        }
        let added = &rest[matched as usize..];
        node.edge.reserve_exact(added.len());
        node.edge.extend_from_slice(added);
        self.blocks += added.len();
        Some((number, length_of(rest)))
    }

    fn add_leaf(&mut self, parent: u32, edge: &[LocalBlockHash]) -> u32 {
        let number = self.nodes.insert(Node {
            edge: edge.to_vec(),
            stairs: Vec::new(),
            parent,
            children: 0,
            children_xor: 0,
        });
        self.heads.insert((parent, edge[0]), number);
        self.blocks += edge.len();
        if parent != NONE {
            let parent = &mut self.nodes[parent];
            parent.children += 1;
            parent.children_xor ^= number;
        }
        number
    }

    /// Gives the first `matched` blocks of `node` to the walk's run; returns how many of them the slot held before.
    fn claim(
        &mut self,
        node: u32,
        matched: u32,
        walk: &Walk,
        taken: &mut Vec<(u32, u32)>,
        tail_deadline: &mut Moment,
    ) -> u32 {
        let Self { nodes, scratch, .. } = self;
        let stairs = &mut nodes[node].stairs;
        let first = stairs.partition_point(|stair| stair.slot < walk.slot);
        let last = first + stairs[first..].partition_point(|stair| stair.slot == walk.slot);
        scratch.clear();
        let mut start = 0;
        for stair in &stairs[first..last] {
            if start < matched {
                let end = stair.end.min(matched);
                taken.push((stair.run, end - start));
                *tail_deadline = stair.deadline.max(walk.deadline);
                push_stair(scratch, walk.stair(*tail_deadline, end));
            }
            if stair.end > matched {
                scratch.push(*stair);
            }
            start = stair.end;
        }
        if start < matched {
            *tail_deadline = walk.deadline;
            push_stair(scratch, walk.stair(walk.deadline, matched));
        }
        let grown = scratch.len().saturating_sub(last - first);
        if stairs.len() < FEW_STAIRS {
            stairs.reserve_exact(grown);
        }
        stairs.splice(first..last, scratch.drain(..));
        start.min(matched)
    }

    /// Splits a node after `length` blocks and returns the new node above it.
    fn split(&mut self, number: u32, length: u32, runs: &mut Slab<Run>) -> u32 {
        let lower = &mut self.nodes[number];
        let lower_edge = lower.edge[length as usize..].to_vec();
        let mut edge = std::mem::replace(&mut lower.edge, lower_edge);
        edge.truncate(length as usize);
        edge.shrink_to_fit();
        let (stairs, parent) = (std::mem::take(&mut lower.stairs), lower.parent);
        let (head, lower_head) = (edge[0], lower.edge[0]);
        let upper = self.nodes.insert(Node {
            edge,
            stairs: Vec::new(),
            parent,
            children: 1,
            children_xor: number,
        });
        self.heads.insert((parent, head), upper);
        self.heads.insert((upper, lower_head), number);
        self.nodes[number].parent = upper;
        if parent != NONE {
            self.nodes[parent].children_xor ^= number ^ upper;
        }
        self.split_stairs(&stairs, length, (upper, number), runs);
        upper
    }

    /// Deals the stairs of a node that was split after `length` blocks into its two parts.
    fn split_stairs(
        &mut self,
        stairs: &[Stair],
        length: u32,
        (upper, lower): (u32, u32),
        runs: &mut Slab<Run>,
    ) {
        let mut above = Vec::with_capacity(stairs.len());
        let mut below = Vec::new();
        for (at, stair) in stairs.iter().enumerate() {
            if stair_start(stairs, at) < length {
                above.push(Stair {
                    end: stair.end.min(length),
                    ..*stair
                });
            }
            if stair.end > length {
                below.push(Stair {
                    end: stair.end - length,
                    ..*stair
                });
            }
            let goes_on = stairs.get(at + 1).is_some_and(|next| next.run == stair.run);
            if stair.end <= length && !goes_on && runs[stair.run].tail == lower {
                runs[stair.run].tail = upper;
            }
        }
        above.shrink_to_fit();
        below.shrink_to_fit();
        self.nodes[upper].stairs = above;
        self.nodes[lower].stairs = below;
    }

    /// Joins a node with its only child, which keeps its number.
    fn merge(&mut self, number: u32, runs: &mut Slab<Run>) {
        let upper = self.nodes.remove(number);
        let child = upper.children_xor;
        if upper.parent != NONE {
            self.nodes[upper.parent].children_xor ^= number ^ child;
        }
        let lower = &mut self.nodes[child];
        self.heads.remove(&(number, lower.edge[0]));
        self.heads.insert((upper.parent, upper.edge[0]), child);
        let mut edge = Vec::with_capacity(upper.edge.len() + lower.edge.len());
        edge.extend_from_slice(&upper.edge);
        edge.extend_from_slice(&lower.edge);
        lower.edge = edge;
        lower.parent = upper.parent;

        let length = length_of(&upper.edge);
        let mut below = std::mem::take(&mut lower.stairs).into_iter().peekable();
        let mut stairs = Vec::with_capacity(upper.stairs.len());
        for (at, stair) in upper.stairs.iter().enumerate() {
            if runs[stair.run].tail == number {
                runs[stair.run].tail = child;
            }
            push_stair(&mut stairs, *stair);
            let is_last = upper
                .stairs
                .get(at + 1)
                .is_none_or(|next| next.slot != stair.slot);
            while let Some(next) = below.next_if(|next| is_last && next.slot == stair.slot) {
                push_stair(
                    &mut stairs,
                    Stair {
                        end: length + next.end,
                        ..next
                    },
                );
            }
        }
        stairs.shrink_to_fit();
        lower.stairs = stairs;
    }
}

impl Walk {
    const fn stair(&self, deadline: Moment, end: u32) -> Stair {
        Stair {
            deadline,
            slot: self.slot,
            run: self.run,
            end,
        }
    }
}

/// Appends a stair, as one with the stair before when they differ in their end only.
fn push_stair(stairs: &mut Vec<Stair>, stair: Stair) {
    match stairs.last_mut() {
        Some(last) if last.run == stair.run && last.deadline == stair.deadline => {
            last.end = stair.end
        }
        _ => stairs.push(stair),
    }
}

/// Returns the position of the last stair of `slot`, which has one.
fn last_stair_of(stairs: &[Stair], slot: u32) -> usize {
    let end = stairs.partition_point(|stair| stair.slot <= slot);
    debug_assert!(end > 0 && stairs[end - 1].slot == slot);
    end - 1
}

/// Returns where the stair at position `at` begins.
fn stair_start(stairs: &[Stair], at: usize) -> u32 {
    match at.checked_sub(1) {
        Some(before) if stairs[before].slot == stairs[at].slot => stairs[before].end,
        _ => 0,
    }
}

/// Counts the leading blocks that `edge` and `rest` share.
fn shared_blocks(edge: &[LocalBlockHash], rest: &[LocalBlockHash]) -> u32 {
    length_of(&rest[..common_prefix(edge, rest)])
}

/// Returns a length in blocks; prompts are cut to what fits 32 bits before they come here.
fn length_of(blocks: &[LocalBlockHash]) -> u32 {
    u32::try_from(blocks.len()).unwrap_or(u32::MAX)
}

/// Below this many stairs a node's list grows without slack: most nodes have one or two holders.
const FEW_STAIRS: usize = 8;

#[cfg(test)]
impl Tree {
    /// Checks the tree by itself and returns the blocks of each run.
    pub(super) fn check(&self, runs: &Slab<Run>) -> HashMap<u32, u32> {
        let mut of_run: HashMap<u32, u32> = HashMap::new();
        let mut children: HashMap<u32, (u32, u32)> = HashMap::new();
        for (number, node) in self.nodes.iter() {
            assert_eq!(self.heads.get(&(node.parent, node.edge[0])), Some(&number));
            assert!(!node.stairs.is_empty(), "node {number} is held by nobody");
            assert_ne!(
                node.children, 1,
                "node {number} is not joined with its child"
            );
            let mut reached = 0;
            for (at, stair) in node.stairs.iter().enumerate() {
                let start = stair_start(&node.stairs, at);
                assert!(start < stair.end && stair.end as usize <= node.edge.len());
                reached = reached.max(stair.end as usize);
                *of_run.entry(stair.run).or_default() += stair.end - start;
                assert_eq!(runs[stair.run].slot, stair.slot);
                if start > 0 {
                    assert!(node.stairs[at - 1].deadline >= stair.deadline);
                } else if node.parent != NONE {
                    let above = &self.nodes[node.parent];
                    let last = last_stair_of(&above.stairs, stair.slot);
                    assert_eq!(above.stairs[last].end as usize, above.edge.len());
                    assert!(above.stairs[last].deadline >= stair.deadline);
                }
            }
            assert_eq!(reached, node.edge.len());
            if node.parent != NONE {
                let (count, xor) = children.entry(node.parent).or_default();
                *count += 1;
                *xor ^= number;
            }
        }
        for (number, node) in self.nodes.iter() {
            let found = children.get(&number).copied().unwrap_or_default();
            assert_eq!(found, (node.children, node.children_xor));
        }
        assert_eq!(
            self.blocks,
            self.nodes
                .iter()
                .map(|(_, node)| node.edge.len())
                .sum::<usize>()
        );
        of_run
    }

    pub(super) fn heap_bytes(&self) -> usize {
        const MALLOC: usize = 16;
        let heads = self.heads.capacity() * 8 / 7 * (size_of::<((u32, LocalBlockHash), u32)>() + 1);
        let nodes = self.nodes.iter().map(|(_, node)| {
            let edge = node.edge.capacity() * size_of::<LocalBlockHash>();
            let stairs = node.stairs.capacity() * size_of::<Stair>();
            edge + stairs + size_of::<Node>() + 3 * MALLOC + 8
        });
        heads + nodes.sum::<usize>()
    }
}
