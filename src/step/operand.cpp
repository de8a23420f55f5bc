// The loads of an encoded operand.
#include "step/operand.h"

namespace tenon {

OperandLoads loads_of(const Operand& o, uint32_t arg, const ColumnMap& columns) {
  const Orientation side = o.read();
  OperandLoads loads{.codes = {Load::From::tile, arg + in_data, o.format.dtype, columns}};
  loads.codes.transposed = side == Orientation::columnwise && info(o.format.scaling).transposes;
  if (o.format.scaling == Scaling::none) return loads;
  Load scale{
      .from = Load::From::scalar, .arg = arg + in_scale_inv, .dtype = info(o.format.scaling).scale};
  if (!o.format.blocks(side).single()) {
    scale.from = Load::From::block;
    scale.columns = columns;
    scale.format = o.format;
    scale.orientation = side;
  }
  loads.scale = scale;
  return loads;
}

}  // namespace tenon
