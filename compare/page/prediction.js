// compare/prediction/step.py in JavaScript; tests/prediction_vectors.json holds both together.
const UNLIMITED = (value) => value ?? Infinity;  // JSON has no infinity

function allreduce(inputs, cluster, size, scale) {
  const hosts = cluster.hosts, own = cluster.workers_per_host, workers = hosts * own;
  const { within, between } = cluster.network, outer = hosts > 1 ? between : within;
  const sent = 2 * (workers - 1) / workers * size;
  const across = Math.min(hosts > 1 ? hosts : 0, workers - 1);
  const ring = 2 * across * between.latency_seconds
    + 2 * (workers - 1 - across) * within.latency_seconds;
  const tree = 2 * Math.ceil(Math.log2(hosts)) * between.latency_seconds
    + 2 * Math.ceil(Math.log2(own)) * within.latency_seconds;
  const latency = { ring, halving: tree }[inputs.algorithm] ?? Math.min(ring, tree);
  let wire = sent / UNLIMITED(outer.bytes_per_second), cpu = sent * outer.cpu_seconds_per_byte;
  if (inputs.algorithm === "halving") {
    const power = 2 ** Math.floor(Math.log2(workers)), folds = power < workers ? 1 : 0;
    const exchanged = (2 * (power - 1) / power + 0.5 * folds) * outer.both_ways_factor;
    wire = (exchanged + 1.5 * folds) * size / UNLIMITED(outer.bytes_per_second);
  }
  if (hosts > 1 && own > 1) wire = Math.max(wire, sent / UNLIMITED(within.bytes_per_second));
  if (inputs.algorithm === "two-level" && hosts > 1) {
    const inside = 2 * (own - 1) / own * size, outside = 2 * (hosts - 1) / hosts * size;
    wire = inside / UNLIMITED(within.bytes_per_second) + outside / UNLIMITED(between.bytes_per_second);
    cpu = inside * within.cpu_seconds_per_byte + outside / own * between.cpu_seconds_per_byte;
  }
  const factor = inputs.exchange_factor;
  const late = latency + 2 * (factor - 1) * outer.latency_seconds;
  return [late * scale.latency, wire / scale.bandwidth, cpu * factor * scale.cpu];
}

function simulate(inputs, cluster, scale) {
  const workers = cluster.hosts * cluster.workers_per_host, threads = inputs.threads;
  const cores = cluster.cores_per_host / cluster.workers_per_host, network = cluster.network;
  const share = 1 + (Math.max(1, threads / cores) - 1) * scale.sharing;
  const free = Math.min(1, Math.max(0, cores - threads));
  const together = cluster.workers_per_host * cluster.hosts_per_machine;
  const busy = Math.max(1, Math.min(1, cores / threads) * together);
  const slow = share * (1 + (inputs.contention - 1) * (busy - 1)) * scale.compute;
  const computed = inputs.backward_seconds * slow, sizes = inputs.gradient_bytes;
  const ready = inputs.ready_seconds.map((seconds) => seconds * slow);
  const link = cluster.hosts > 1 ? network.between : network.within;
  const narrow = inputs.wire_format === "fp16" ? 0.5 : 1;
  let delay = 0, ended = 0, first = 0, messages = 0, agreed = 0;
  while (workers > 1 && first < sizes.length) {
    let begin = ended, last = first + 1, size = sizes[first];
    if (inputs.engine === "ddp") {
      const limit = messages ? inputs.bucket_bytes : inputs.first_bucket_bytes;
      while (last < sizes.length && size < limit) size += sizes[last++];
      begin = Math.max(ready[last - 1] + delay, ended);
    } else {
      if (first >= agreed) {
        begin = Math.max(ready[first] + delay + inputs.cycle_seconds / 2, ended);
        agreed = Math.max(last, ready.filter((seconds) => seconds + delay <= begin).length);
        const asking = inputs.cached ? 0 : 2 * (workers - 1) * link.latency_seconds;
        if (inputs.negotiates) begin += allreduce(inputs, cluster, 0, scale)[0]
          + asking * inputs.exchange_factor * scale.latency;
      }
      while (last < agreed && (size + sizes[last]) * narrow <= inputs.fusion_bytes)
        size += sizes[last++];
    }
    let [latency, wire, cpu] = allreduce(inputs, cluster, size * narrow, scale);
    const copied = inputs.engine === "horovod" && last - first > 1;
    if (copied) cpu += size * narrow * network.copy_seconds_per_byte * scale.cpu;
    if (narrow < 1) cpu += size * network.cast_seconds_per_byte * scale.cpu;
    const left = Math.max(0, computed + delay - begin);
    const taken = Math.min(cpu * share, left) * (1 - free);
    ended = begin + latency + Math.max(wire, cpu * share + taken);
    delay += taken;
    first = last;
    messages += 1;
  }
  const exposed = delay + Math.max(0, ended - computed - delay);
  const step = inputs.data_seconds + inputs.forward_seconds + inputs.backward_seconds
    + inputs.optimizer_seconds + inputs.other_seconds;
  const ranks = Math.max(1, busy * cluster.hosts / cluster.hosts_per_machine);
  const straggler = inputs.spread_seconds * scale.spread * Math.log(ranks);
  const seconds = (step * slow + exposed + straggler) * (workers > 1 ? scale.model : 1);
  const read = workers * inputs.batch_size * inputs.image_bytes;
  const storage = read / UNLIMITED(cluster.storage_bytes_per_second);
  return { seconds: Math.max(seconds, storage), exposed, alone: step };
}

function predictStep(inputs, cluster, uncertain, quantile) {
  const told = Object.fromEntries(Object.keys(uncertain).map((name) => [name, 1]));
  const step = simulate(inputs, cluster, told);
  const squares = Object.entries(uncertain).map(([name, sd]) =>
    (simulate(inputs, cluster, { ...told, [name]: 1 + sd }).seconds - step.seconds) ** 2);
  const wide = quantile * Math.sqrt(squares.reduce((a, b) => a + b, 0)) / step.seconds;
  return {
    step_seconds: step.seconds, exposed_seconds: step.exposed,
    low_seconds: step.seconds * Math.exp(-wide), high_seconds: step.seconds * Math.exp(wide),
    efficiency: step.alone / step.seconds,
  };
}

function atBatch(inputs, batch) {
  const factor = batch / inputs.batch_size, { data_seconds, forward_seconds, backward_seconds } = inputs;
  return { ...inputs, batch_size: batch, ready_seconds: inputs.ready_seconds.map((t) => t * factor),
    data_seconds: data_seconds * factor, forward_seconds: forward_seconds * factor,
    backward_seconds: backward_seconds * factor };
}
