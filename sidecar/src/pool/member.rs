//! One life of one worker, as a state machine without a clock and without a socket.
//!
//! A life begins when a worker is added and ends when it is removed; another process under the same name is another life with
//! another epoch. What is learned of a life (a probe's result, a breaker's change, a source's word) is told to that life's own
//! [`Member`], and one that is gone takes in nothing more. So nothing that comes late can mark the next life.
//!
//! The state is a function of the last fact of each kind, not of the order in which they came: a probe that answers while a
//! worker drains does not end the drain.

use std::fmt;

use serde::Serialize;

use super::roster::Phase;

/// Which life it is: counts up over all workers of a sidecar, and is never used twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Epoch(pub u64);

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Where a life stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Its source says that it is not ready, or no probe has answered yet.
    Starting,
    /// It answers and takes requests.
    Ready,
    /// It finishes what it has and gets nothing new.
    Draining,
    /// It does not answer, answers that it is not well, or failed too often in a row.
    Unhealthy,
    /// It was removed.
    Gone,
}

impl MemberState {
    /// Every state, for metrics with one series a state.
    pub const ALL: [Self; 5] = [
        Self::Starting,
        Self::Ready,
        Self::Draining,
        Self::Unhealthy,
        Self::Gone,
    ];

    /// Returns the name used in metrics and listings.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::Unhealthy => "unhealthy",
            Self::Gone => "gone",
        }
    }
}

/// What a health probe found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Probe {
    /// It works.
    Healthy,
    /// It answers that it does not.
    Unwell(String),
    /// It does not answer: whoever waits for it should wait no longer.
    Gone(String),
}

/// What may be learned of a life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fact {
    /// What its source says.
    Phase(Phase),
    /// Whether its source still lists it.
    Listed(bool),
    /// Whether an operator asked for it to be drained.
    DrainAsked(bool),
    /// What a health probe found.
    Probed(Probe),
    /// Whether its breaker passes requests.
    BreakerPasses(bool),
    /// It was removed.
    Removed,
}

/// One life.
#[derive(Clone, Debug)]
pub struct Member {
    epoch: Epoch,
    phase: Phase,
    listed: bool,
    drain_asked: bool,
    /// `None` before the first probe has ended.
    probe: Option<Probe>,
    breaker_passes: bool,
    gone: bool,
}

impl Member {
    /// Begins a life: listed by its source in `phase`, not probed yet.
    #[must_use]
    pub const fn new(epoch: Epoch, phase: Phase) -> Self {
        Self {
            epoch,
            phase,
            listed: true,
            drain_asked: false,
            probe: None,
            breaker_passes: true,
            gone: false,
        }
    }

    /// Begins another life of the same worker: what its source and operators say of it holds on, and what was found does not.
    #[must_use]
    pub fn reborn(&self, epoch: Epoch) -> Self {
        Self {
            epoch,
            probe: None,
            breaker_passes: true,
            gone: false,
            ..self.clone()
        }
    }

    /// Takes in a fact; tells whether it was heard. A life that is over hears nothing.
    pub fn learn(&mut self, fact: Fact) -> bool {
        if self.gone {
            return false;
        }
        match fact {
            Fact::Phase(phase) => self.phase = phase,
            Fact::Listed(listed) => self.listed = listed,
            Fact::DrainAsked(asked) => self.drain_asked = asked,
            Fact::Probed(probe) => self.probe = Some(probe),
            Fact::BreakerPasses(passes) => self.breaker_passes = passes,
            Fact::Removed => self.gone = true,
        }
        true
    }

    /// Returns which life it is.
    #[must_use]
    pub const fn epoch(&self) -> Epoch {
        self.epoch
    }

    /// Returns where it stands.
    #[must_use]
    pub fn state(&self) -> MemberState {
        if self.gone {
            MemberState::Gone
        } else if self.is_draining() {
            MemberState::Draining
        } else if self.phase == Phase::Starting {
            MemberState::Starting
        } else if self.is_failing() || !self.breaker_passes {
            MemberState::Unhealthy
        } else if self.probe.is_none() {
            MemberState::Starting
        } else {
            MemberState::Ready
        }
    }

    /// Says why it is not ready.
    #[must_use]
    pub fn cause(&self) -> Option<&str> {
        match self.state() {
            MemberState::Ready | MemberState::Gone => None,
            MemberState::Draining if !self.listed => Some("its source no longer lists it"),
            MemberState::Draining if self.drain_asked => Some("an operator drains it"),
            MemberState::Draining => Some("its source says that it leaves"),
            MemberState::Starting if self.phase == Phase::Starting => {
                Some("its source says that it starts")
            }
            MemberState::Starting => Some("no health probe has answered yet"),
            MemberState::Unhealthy => match &self.probe {
                Some(Probe::Unwell(cause) | Probe::Gone(cause)) => Some(cause),
                _ => Some("its breaker is open"),
            },
        }
    }

    /// Tells whether it finishes what it has and gets nothing new.
    #[must_use]
    pub fn is_draining(&self) -> bool {
        self.drain_asked || !self.listed || self.phase == Phase::Leaving
    }

    /// Tells whether its source asks for its end: it is removed as soon as it has nothing left to finish.
    #[must_use]
    pub fn is_leaving(&self) -> bool {
        !self.listed || self.phase == Phase::Leaving
    }

    /// Tells whether it can be chosen as far as its health and its source say. One that nobody has probed yet can: the first
    /// requests need not wait for the first probe, and go elsewhere when they find nobody.
    #[must_use]
    pub fn is_available(&self) -> bool {
        !self.gone && self.phase != Phase::Starting && !self.is_failing() && self.breaker_passes
    }

    /// Tells whether its source says that it starts.
    #[must_use]
    pub fn is_said_to_start(&self) -> bool {
        self.phase == Phase::Starting
    }

    /// Tells whether it may be given a new request.
    #[must_use]
    pub fn may_be_chosen(&self) -> bool {
        self.is_available() && !self.is_draining()
    }

    /// Returns whether the last probe found it healthy; `None` before the first.
    #[must_use]
    pub fn healthy(&self) -> Option<bool> {
        self.probe.as_ref().map(|probe| *probe == Probe::Healthy)
    }

    /// Tells whether the last probe found nobody.
    #[must_use]
    pub const fn is_silent(&self) -> bool {
        matches!(self.probe, Some(Probe::Gone(_)))
    }

    fn is_failing(&self) -> bool {
        self.healthy() == Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts() -> Vec<Fact> {
        let mut all = vec![
            Fact::Phase(Phase::Starting),
            Fact::Phase(Phase::Serving),
            Fact::Phase(Phase::Leaving),
            Fact::Probed(Probe::Healthy),
            Fact::Probed(Probe::Unwell("503".to_owned())),
            Fact::Probed(Probe::Gone("refused".to_owned())),
            Fact::Removed,
        ];
        for value in [false, true] {
            all.push(Fact::Listed(value));
            all.push(Fact::DrainAsked(value));
            all.push(Fact::BreakerPasses(value));
        }
        all
    }

    /// The last fact of each kind before the removal, found from the end.
    fn expected(history: &[Fact]) -> MemberState {
        if history.contains(&Fact::Removed) {
            return MemberState::Gone;
        }
        let has_last = |wanted: &Fact| {
            let same_kind =
                |fact: &&Fact| std::mem::discriminant(*fact) == std::mem::discriminant(wanted);
            history.iter().rev().find(same_kind) == Some(wanted)
        };
        let last_probe = history.iter().rev().find_map(|fact| match fact {
            Fact::Probed(probe) => Some(probe),
            _ => None,
        });
        let drains = [
            Fact::Phase(Phase::Leaving),
            Fact::Listed(false),
            Fact::DrainAsked(true),
        ];
        if drains.iter().any(has_last) {
            return MemberState::Draining;
        }
        if has_last(&Fact::Phase(Phase::Starting)) {
            return MemberState::Starting;
        }
        match last_probe {
            _ if has_last(&Fact::BreakerPasses(false)) => MemberState::Unhealthy,
            None => MemberState::Starting,
            Some(Probe::Healthy) => MemberState::Ready,
            Some(_) => MemberState::Unhealthy,
        }
    }

    /// 13 facts in every order with repetition, up to 5 of them.
    #[test]
    fn the_state_follows_the_last_fact_of_each_kind_in_every_order() {
        fn extend(history: &mut Vec<Fact>, member: &Member, facts: &[Fact], seen: &mut usize) {
            *seen += 1;
            let state = member.state();
            assert_eq!(state, expected(history), "{history:?}");
            let may_be_chosen = match state {
                MemberState::Ready => true,
                // Before the first probe it is believed to work, unless its source says otherwise.
                MemberState::Starting => member.phase != Phase::Starting,
                MemberState::Draining | MemberState::Unhealthy | MemberState::Gone => false,
            };
            assert_eq!(member.may_be_chosen(), may_be_chosen, "{history:?}");
            assert_eq!(
                member.cause().is_some(),
                !matches!(state, MemberState::Ready | MemberState::Gone)
            );
            if history.len() == 5 {
                return;
            }
            for fact in facts {
                let mut next = member.clone();
                let heard = next.learn(fact.clone());
                assert_eq!(heard, state != MemberState::Gone, "{history:?}, {fact:?}");
                history.push(fact.clone());
                extend(history, &next, facts, seen);
                history.pop();
            }
        }
        let mut seen = 0;
        let member = Member::new(Epoch(1), Phase::Serving);
        extend(&mut Vec::new(), &member, &facts(), &mut seen);
        // 1 + 13 + 13² + 13³ + 13⁴ + 13⁵
        assert_eq!(seen, 402_234);
    }

    #[test]
    fn another_life_keeps_what_was_said_and_nothing_that_was_found() {
        let mut member = Member::new(Epoch(1), Phase::Serving);
        member.learn(Fact::DrainAsked(true));
        member.learn(Fact::Probed(Probe::Healthy));
        member.learn(Fact::BreakerPasses(false));
        member.learn(Fact::Removed);
        let mut next = member.reborn(Epoch(2));
        assert!(next.is_draining() && next.healthy().is_none());
        next.learn(Fact::DrainAsked(false));
        assert!(next.may_be_chosen() && next.epoch() == Epoch(2));
    }

    #[test]
    fn the_cause_is_the_one_that_decides() {
        let mut member = Member::new(Epoch(7), Phase::Serving);
        assert_eq!(member.cause(), Some("no health probe has answered yet"));
        member.learn(Fact::Probed(Probe::Gone("refused".to_owned())));
        assert_eq!(member.cause(), Some("refused"));
        assert!(member.is_silent() && !member.is_leaving());
        member.learn(Fact::Probed(Probe::Healthy));
        member.learn(Fact::BreakerPasses(false));
        assert_eq!(member.cause(), Some("its breaker is open"));
        member.learn(Fact::DrainAsked(true));
        assert_eq!(member.cause(), Some("an operator drains it"));
        assert!(!member.is_leaving(), "an operator's drain removes nothing");
        member.learn(Fact::Listed(false));
        assert_eq!(member.cause(), Some("its source no longer lists it"));
        assert!(member.is_leaving());
        assert_eq!(member.epoch().to_string(), "7");
    }
}
