/** Waits until a condition holds; after ten seconds it is an error that tells what `describe` says. */
export async function until(holds: () => boolean | Promise<boolean>, describe: () => string = () => 'it did not come about'): Promise<void> {
  const end = performance.now() + 10_000
  while (!(await holds())) {
    if (performance.now() > end) throw new Error(describe())
    await new Promise((resolve) => setTimeout(resolve, 10))
  }
}
