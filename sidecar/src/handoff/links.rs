//! Which link a transfer between two workers goes over.

use kvlane::handoff::{HandoffPlanner, LinkId};
use serde::{Deserialize, Serialize};

use crate::config::seconds;

/// One physical link. Every pair of hosts that it matches shares it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LinkSettings {
    /// Host of the prefill workers, or `*`: every host, as for the port of the decode workers' host.
    pub from: String,
    /// Host of the decode workers, or `*`.
    pub to: String,
    /// Bytes per second of one transfer alone. Later transfers correct it.
    pub bytes_per_second: f64,
    /// Seconds that a transfer takes whatever its size (default 0).
    #[serde(default)]
    pub fixed_seconds: f64,
}

impl LinkSettings {
    fn matches(&self, from: &str, to: &str) -> bool {
        let is = |pattern: &str, host: &str| pattern == "*" || pattern == host;
        is(&self.from, from) && is(&self.to, to)
    }

    fn id(&self) -> LinkId {
        LinkId::new(&format!("{}→{}", self.from, self.to))
    }
}

/// The links that are known, the default last.
#[derive(Clone, Debug)]
pub struct Links {
    listed: Vec<(LinkSettings, LinkId)>,
    default: LinkId,
}

/// Name of the link of every pair that is not listed.
pub const DEFAULT_LINK: &str = "configured";

impl Links {
    /// Tells the planner of each link.
    ///
    /// # Errors
    /// A speed is out of range; the error names it.
    pub fn seed(
        planner: &HandoffPlanner,
        listed: &[LinkSettings],
        (bytes_per_second, fixed_seconds): (f64, f64),
    ) -> kvlane::Result<Self> {
        let default = LinkId::new(DEFAULT_LINK);
        planner.seed_link(&default, bytes_per_second, seconds(fixed_seconds))?;
        let seed = |link: &LinkSettings| {
            let id = link.id();
            planner.seed_link(&id, link.bytes_per_second, seconds(link.fixed_seconds))?;
            Ok((link.clone(), id))
        };
        let listed: kvlane::Result<_> = listed.iter().map(seed).collect();
        Ok(Self {
            listed: listed?,
            default,
        })
    }

    /// Returns the link between two hosts: the first listed that matches.
    #[must_use]
    pub fn between(&self, from: &str, to: &str) -> LinkId {
        let listed = self.listed.iter().find(|(link, _)| link.matches(from, to));
        listed.map_or(&self.default, |(_, id)| id).clone()
    }
}

#[cfg(test)]
mod tests {
    use kvlane::handoff::HandoffConfig;

    use super::*;

    #[test]
    fn the_first_that_matches_both_hosts_is_taken() {
        let link = |from: &str, to: &str, bytes_per_second| LinkSettings {
            from: from.to_owned(),
            to: to.to_owned(),
            bytes_per_second,
            fixed_seconds: 0.001,
        };
        let listed = [
            link("a", "a", 6e9),
            link("a", "*", 1e8),
            link("*", "c", 2e8),
        ];
        let planner = HandoffPlanner::new(HandoffConfig::default()).unwrap();
        let links = Links::seed(&planner, &listed, (5e7, 0.0)).unwrap();
        for (from, to, name) in [
            ("a", "a", "a→a"),
            // Everything that leaves a shares its port.
            ("a", "b", "a→*"),
            ("a", "c", "a→*"),
            ("b", "c", "*→c"),
            ("b", "a", DEFAULT_LINK),
        ] {
            assert_eq!(links.between(from, to).as_str(), name, "{from} {to}");
        }
        let known = planner.stats().links;
        let speeds: Vec<_> = known.iter().map(|link| link.bytes_per_second).collect();
        assert_eq!(known.len(), 4);
        assert!(speeds.contains(&Some(6e9)) && speeds.contains(&Some(5e7)));
        let wrong = Links::seed(&planner, &[link("a", "b", 0.0)], (1.0, 0.0));
        assert!(wrong.unwrap_err().to_string().contains("bytes_per_second"));
    }
}
