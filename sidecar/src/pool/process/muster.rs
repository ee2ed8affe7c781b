//! Whether all engines of a template came, told once.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tracing::{info, warn};

/// The first outcome of each replica of a template.
#[derive(Debug)]
pub(super) struct Muster {
    template: String,
    total: usize,
    /// Why each one that did not come did not.
    outcomes: Mutex<BTreeMap<String, Option<String>>>,
}

impl Muster {
    pub(super) const fn new(template: String, total: usize) -> Self {
        Self {
            template,
            total,
            outcomes: Mutex::new(BTreeMap::new()),
        }
    }

    /// Takes in that a replica is ready, or why it is not. Later outcomes of the same one are no news here.
    pub(super) fn take(&self, name: &str, why_not: Option<&str>) {
        let mut outcomes = self.outcomes.lock();
        if outcomes.contains_key(name) {
            return;
        }
        outcomes.insert(name.to_owned(), why_not.map(str::to_owned));
        if outcomes.len() < self.total {
            return;
        }
        let missing: Vec<_> = outcomes
            .iter()
            .filter_map(|(name, why_not)| Some(format!("{name} {}", why_not.as_ref()?)))
            .collect();
        let (template, total) = (&self.template, self.total);
        if missing.is_empty() {
            info!(template, engines = total, "all engines are ready");
        } else {
            let ready = total - missing.len();
            let missing = missing.join("; ");
            warn!(
                template,
                ready,
                of = total,
                missing,
                "engines are missing; the others serve without them"
            );
        }
    }
}
