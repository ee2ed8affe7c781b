//! Which replica gets which GPUs, decided once before anything starts.

use std::collections::HashSet;

use super::gpu::{Gpu, Inventory};
use super::launch::Replica;
use crate::config::{Gpus, ProcessTemplate};

/// Lists the replicas of every template, in order.
///
/// `visible` is the sidecar's own `CUDA_VISIBLE_DEVICES`: what it may not see, its engines may not either.
///
/// # Errors
/// Names the template and what it asks for that this machine does not have.
pub(super) fn assign(
    templates: &[ProcessTemplate],
    inventory: Result<&Inventory, &str>,
    visible: Option<&str>,
) -> Result<Vec<Vec<Replica>>, String> {
    for (index, template) in templates.iter().enumerate() {
        check(template, inventory)
            .map_err(|error| format!("processes[{index}] ({}): {error}", template.name))?;
    }
    let mut free = Free::new(templates, inventory, visible);
    let replicas = templates.iter().enumerate().map(|(index, template)| {
        let sets = sets(template, inventory, &mut free);
        let sets =
            sets.map_err(|error| format!("processes[{index}] ({}).gpus: {error}", template.name))?;
        let replicas = sets.into_iter().enumerate().map(|(index, gpus)| Replica {
            name: template.worker_name(index),
            index,
            gpus,
        });
        Ok(replicas.collect())
    });
    replicas.collect()
}

/// Checks a template against the driver.
fn check(template: &ProcessTemplate, inventory: Result<&Inventory, &str>) -> Result<(), String> {
    let Ok(inventory) = inventory else {
        return Ok(());
    };
    if let (Some(wanted), Some(has)) = (template.cuda, inventory.cuda)
        && wanted > has
    {
        return Err(format!(
            "cuda: {wanted} is asked for and the driver {} serves CUDA up to {has}; install a newer driver, or an engine built for an older CUDA",
            inventory.driver
        ));
    }
    if let Gpus::Sets(sets) = &template.gpus {
        for name in sets.iter().flatten() {
            // A part of a card is not in the inventory.
            let is_known = inventory.gpus.iter().any(|gpu| gpu.is_called(name));
            if !is_known && !name.starts_with("MIG-") {
                return Err(format!(
                    "gpus: {name} is not on this machine, which has {}",
                    list(inventory)
                ));
            }
        }
    }
    Ok(())
}

/// Returns the GPUs of each replica.
fn sets(
    template: &ProcessTemplate,
    inventory: Result<&Inventory, &str>,
    free: &mut Free<'_>,
) -> Result<Vec<Vec<String>>, String> {
    match &template.gpus {
        Gpus::Inherited => Ok(vec![Vec::new(); template.replicas.unwrap_or(1)]),
        Gpus::Sets(sets) => Ok(sets.clone()),
        Gpus::Auto => {
            let inventory = inventory.map_err(|why| {
                format!("auto needs to know this machine's GPUs, and {why}; list them instead")
            })?;
            let each = template.gpus_per_replica;
            let replicas = template.replicas.unwrap_or_else(|| free.count() / each);
            if replicas == 0 || replicas * each > free.count() {
                return Err(format!(
                    "auto: {} free GPUs are not enough for {} replicas with {each} each; this machine has {}",
                    free.count(),
                    replicas.max(1),
                    list(inventory)
                ));
            }
            Ok((0..replicas).map(|_| free.take(each)).collect())
        }
    }
}

/// The GPUs that `auto` may give.
struct Free<'a>(std::vec::IntoIter<&'a Gpu>);

impl<'a> Free<'a> {
    fn new(
        templates: &[ProcessTemplate],
        inventory: Result<&'a Inventory, &str>,
        visible: Option<&str>,
    ) -> Self {
        let listed: HashSet<&str> = templates
            .iter()
            .filter_map(|template| match &template.gpus {
                Gpus::Sets(sets) => Some(sets.iter().flatten().map(String::as_str)),
                Gpus::Inherited | Gpus::Auto => None,
            })
            .flatten()
            .collect();
        let is_visible = |gpu: &Gpu| {
            visible.is_none_or(|visible| visible.split(',').any(|name| gpu.is_called(name.trim())))
        };
        let gpus = inventory.map_or(&[][..], |inventory| &inventory.gpus[..]);
        let free: Vec<_> = gpus
            .iter()
            .filter(|gpu| !listed.iter().any(|name| gpu.is_called(name)) && is_visible(gpu))
            .collect();
        Self(free.into_iter())
    }

    fn count(&self) -> usize {
        self.0.len()
    }

    fn take(&mut self, count: usize) -> Vec<String> {
        self.0
            .by_ref()
            .take(count)
            .map(|gpu| gpu.index.to_string())
            .collect()
    }
}

fn list(inventory: &Inventory) -> String {
    if inventory.gpus.is_empty() {
        return "no GPU".to_owned();
    }
    let names: Vec<_> = inventory.gpus.iter().map(Gpu::to_string).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, CudaVersion};

    fn templates(text: &str) -> Vec<ProcessTemplate> {
        let one = |more: &str| format!("{{command: [x, '{{port}}'], {more}}}");
        let all: Vec<_> = text.split(';').map(one).collect();
        let text = format!("processes: [{}]", all.join(", "));
        Config::from_yaml(&text, "test").unwrap().processes
    }

    fn machine(gpus: u32) -> Inventory {
        Inventory {
            driver: "570.1".to_owned(),
            cuda: Some(CudaVersion {
                major: 12,
                minor: 8,
            }),
            gpus: (0..gpus)
                .map(|index| Gpu {
                    index,
                    uuid: format!("GPU-{index}aaa"),
                    name: "H".to_owned(),
                    memory_bytes: 80 << 30,
                    free_bytes: 79 << 30,
                    users: Vec::new(),
                })
                .collect(),
        }
    }

    fn assigned(text: &str, gpus: u32, visible: Option<&str>) -> Result<Vec<Vec<String>>, String> {
        let machine = machine(gpus);
        let replicas = assign(&templates(text), Ok(&machine), visible)?;
        let names = |replica: &Replica| format!("{}={}", replica.name, replica.gpus.join(","));
        Ok(replicas
            .iter()
            .map(|list| list.iter().map(names).collect())
            .collect())
    }

    #[test]
    fn auto_gives_each_replica_its_own_and_leaves_listed_ones() {
        let all = assigned("name: w, gpus: auto", 3, None).unwrap();
        assert_eq!(all, [["w-0=0", "w-1=1", "w-2=2"]]);
        let text = "name: w, gpus: auto, gpus_per_replica: 2; name: x, gpus: [1, GPU-4a]; name: z, gpus: auto, replicas: 1";
        let refused = assigned(text, 6, None).unwrap_err();
        assert!(refused.contains("processes[2] (z).gpus"), "{refused}");
        let all = assigned(
            &text.replace("_replica: 2", "_replica: 2, replicas: 1"),
            6,
            None,
        );
        assert_eq!(
            all.unwrap(),
            [vec!["w-0=0,2"], vec!["x-0=1", "x-1=GPU-4a"], vec!["z-0=3"]]
        );
        let all = assigned("name: w, gpus: auto", 4, Some("3, GPU-1aaa")).unwrap();
        assert_eq!(all, [["w-0=1", "w-1=3"]]);
        let none = assigned("name: w, gpus: auto", 2, Some("")).unwrap_err();
        assert!(none.contains("0 free GPUs"), "{none}");
        let few = assigned("name: w, gpus: auto, replicas: 3", 2, None).unwrap_err();
        assert!(
            few.contains("2 free GPUs") && few.contains("3 replicas"),
            "{few}"
        );
    }

    #[test]
    fn two_engines_may_share_a_card_that_is_listed() {
        let all = assigned("name: w, gpus: [0, 0]; name: x, replicas: 2", 1, None).unwrap();
        assert_eq!(all, [["w-0=0", "w-1=0"], ["x-0=", "x-1="]]);
    }

    #[test]
    fn what_the_machine_does_not_have_is_refused_by_name() {
        let error = assigned("name: w, gpus: [0, 7]", 2, None).unwrap_err();
        assert!(
            error.contains("processes[0] (w): gpus: 7 is not") && error.contains("GPU 1"),
            "{error}"
        );
        let error = assigned("name: w, cuda: '12.9'", 1, None).unwrap_err();
        assert!(
            error.contains("12.9") && error.contains("570.1") && error.contains("up to 12.8"),
            "{error}"
        );
        assert!(assigned("name: w, cuda: '12.8'", 1, None).is_ok());
    }

    #[test]
    fn without_nvml_lists_work_and_auto_says_why_not() {
        let none = Err("NVML cannot be loaded");
        let listed = templates("name: w, gpus: [0, [1, 2]], cuda: '12.8'");
        assert_eq!(assign(&listed, none, None).unwrap()[0].len(), 2);
        let error = assign(&templates("name: w, gpus: auto"), none, None).unwrap_err();
        assert!(
            error.contains("processes[0] (w).gpus: auto")
                && error.contains("NVML cannot be loaded"),
            "{error}"
        );
    }
}
